"""The site of `make docs`: pages from outside docs/, and pages made from the code.

`hooks` is what mkdocs calls, `links` finds where a link leads, `reference` and `decisions` write
pages. Imports the program, so it is no part of what is installed.
"""
