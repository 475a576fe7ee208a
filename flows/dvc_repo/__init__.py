"""Access to DVC: the stage graph, recorded hashes, changed stages, the DVC root. DVC itself runs in
child processes.
"""
