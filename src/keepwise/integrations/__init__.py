"""keepwise.integrations"""
