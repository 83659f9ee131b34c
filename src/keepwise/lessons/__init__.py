"""keepwise.lessons"""
