"""Turns files into documents and labelled rows: finds them, cuts them and reads them."""
