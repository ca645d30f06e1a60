"""Child processes: started in one way, forked from a process that has imported what they need.

README.md has the map of this folder.
"""
