"""The transports that send requests to a server: one interface, implemented with aiohttp and with httpx."""
