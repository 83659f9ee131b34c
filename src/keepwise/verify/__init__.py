"""keepwise.verify"""
