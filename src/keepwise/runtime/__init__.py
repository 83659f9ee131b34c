"""keepwise.runtime"""
