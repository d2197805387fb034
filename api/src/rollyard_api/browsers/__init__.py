"""What browsers need: the files of the page, sign-in, sessions, and checks of where requests come from."""
