"""The HTTP part of the engine: routes, request and response bodies, metrics, and the engine as coroutines."""
