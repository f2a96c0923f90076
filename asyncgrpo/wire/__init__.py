"""How processes talk: messages, their packing, and the sockets that carry them."""
