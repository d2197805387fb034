"""The HTTP side: routes, request and response bodies, metrics, and the engine as coroutines."""
