"""A local folder that stands for caches at an address. Design: docs/design/035-caches-on-object-stores.md.

attach.py      from an address to the folder; root.py the folder, and what processes share of it
folder.py      one folder of shards: ensure, ahead, release; names.py its names and small files
file.py        a shard, opened; fetch.py brings its blocks here; stand.py what is here of it (block_map.py)
space.py       how many bytes are here, and which go; locks.py locks that end with their holder
push.py, pull.py   whole caches to an address and from there (transfer.py); clean.py gives copies back
"""
