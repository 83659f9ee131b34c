"""keepwise.session"""
