"""Jobs before and while they run: reading, submitting and watching them."""
