"""How requests reach a server: one interface, implemented with aiohttp and with httpx."""
