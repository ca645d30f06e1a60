"""A cache as files of other libraries, behind `stoker.export`, and `stoker cache export`."""
