"""A real browser for tests and benchmarks of the page, and a witness of what a page does in it."""
