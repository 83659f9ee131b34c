"""keepwise.targets"""
