"""Images with their labels, decoded in the workers: `ImageSource`.

README.md has the map of this folder.
"""
