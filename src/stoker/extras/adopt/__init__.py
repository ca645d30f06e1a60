"""Take over features that exist on disk, `stoker cache adopt`."""
