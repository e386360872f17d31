"""The protocol between clients and the daemon: messages, their encoding, the two channels."""
