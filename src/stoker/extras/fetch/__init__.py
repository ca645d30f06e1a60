"""Named files from elsewhere: checked, resumed, several at once, none lost in silence.

```
wanted ──▶ run ──▶ attempt ──▶ origin (http, rclone, folder) ──▶ partial ──▶ the file's name
            ▲ deadlines, retries              bytes                 journal, digest, rename
```
wanted.py      which files, from where; names are checked, never trusted
listing.py     the files of a folder that is wanted as a whole
origin.py      what a place to fetch from has to offer, and which place an address means
http.py        http and https
rclone.py      remotes of the rclone binary
folder.py      files of this machine's folders and mounts
partial.py     a file that is not whole yet, and its journal
record.py      what was fetched into a folder before
attempt.py     one try at one file, in a thread
run.py         all files: how many at once, deadlines, retries
"""
