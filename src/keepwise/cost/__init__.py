"""keepwise.cost"""
