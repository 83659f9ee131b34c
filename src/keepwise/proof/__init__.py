"""The proof that a planned step is the plain one, bit for bit: `proof` compares what both leave behind."""
