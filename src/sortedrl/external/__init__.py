"""What comes from outside the package: ids of the Hugging Face hub, optional packages, and the user's own objects."""
