"""The ledger's durable form: written by `store`, read by `reader`, proved from the file alone by `verify`."""
