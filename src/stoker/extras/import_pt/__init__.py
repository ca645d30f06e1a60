"""Import a folder of `.pt` files, `stoker import-pt`."""
