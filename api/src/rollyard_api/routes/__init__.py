"""The REST calls, one module per noun."""
