"""An index: rows with their vectors and words, to be searched by meaning, by words or by both.

`record` is what a folder says of itself, `filters` what a search may ask of columns, `table` opens
the folder and searches. LanceDB holds rows, vectors and words; it is imported when it is used.
"""
