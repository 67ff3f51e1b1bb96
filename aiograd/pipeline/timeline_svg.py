def timeline_svg(t,w): return ""
