"""keepwise.proof"""
