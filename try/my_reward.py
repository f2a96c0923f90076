
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    ascii = sum(c.isascii() for c in solution_str) / max(1, len(solution_str))
    return ascii if ground_truth == "ascii" else 1 - ascii
