"""keepwise.estimate"""
