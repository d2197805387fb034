"""The protocols of model providers that the gateway speaks."""
