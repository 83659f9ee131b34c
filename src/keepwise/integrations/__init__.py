"""Other frameworks: callbacks for the Hugging Face `Trainer` and for Lightning, and the stock policies that benchmarks compare with.

Each module is imported by the user who asks for it; nothing here is loaded with Keepwise.
"""
