"""Import a folder of `.pt` files, `stoker cache import-pt`."""
