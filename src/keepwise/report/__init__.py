"""keepwise.report"""
