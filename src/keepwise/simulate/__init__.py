"""keepwise.simulate"""
