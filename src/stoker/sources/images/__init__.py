"""Images with their labels, decoded in the readers: `ImageSource`.

README.md has the map of this folder.
"""
