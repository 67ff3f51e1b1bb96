def timeline_trace(t,u): return {}
def write_trace(t,p): pass
