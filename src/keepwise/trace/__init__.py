"""keepwise.trace"""
