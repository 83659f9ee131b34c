"""keepwise.ir"""
