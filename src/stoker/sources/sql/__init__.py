"""Rows of a database as samples: one ordered read, then arithmetic.

source.py      SQLSource: the public face of everything below
  address.py     where a database is, and how to speak of it without its password
  request.py     what is asked for, as SQL
  table.py       one bulk read in one snapshot: attempts, keys that are checked, what was dropped
    sqlite.py      through the standard library
    postgres.py    through psycopg: binary COPY, or binary rows in batches (copy_binary.py)
    pick.py        of nested JSON the database sends the values that rules use, and no others
  rows.py        a row as bytes, the same from every database: what is digested and kept
  spill.py       those bytes, in a file without a name that readers map
  rules.py       from values of columns to fields of a sample
    values.py      one value: numbers, text, times, bytes
    nested.py      JSON: lists of objects as padded arrays and masks, places in metres
    parse.py       rules as they are written
  standard.py    mean and deviation of the training rows

Readers never ask the database: rows are read once, in the process that made the source, and lie in a file
that every reader maps. So there is one snapshot, one query, and no copy for each reader. Fields are made of
many rows at a time, in the readers.
"""
