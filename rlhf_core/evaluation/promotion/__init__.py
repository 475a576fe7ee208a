"""The statistics of a promotion: is the challenger better than the champion, and is it worse in nothing that counts?"""
