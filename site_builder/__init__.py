"""The site of `make docs`: pages from outside docs/, and pages made from the code.

mkdocs calls `hooks`; `links` finds where a link leads, and `reference` writes pages from the code.
`check` checks the finished site, and `attention` draws pictures for docs/images/. All of them
import the program, so this package is not installed with it.
"""
