"""keepwise.measure"""
