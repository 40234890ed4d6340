"""Schedules: what each one costs on the real engine and in the simulator, and how fast the controller is."""
