"""The page from the command line: links to it, and the browser in which it is opened."""
