"""keepwise.plan"""
