"""Files to documents, and to labelled rows: which there are, how they are cut and read."""
