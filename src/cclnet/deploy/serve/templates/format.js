// Text of numbers and labels, for the page and for the picture.

export function percent(share) {
  if (share > 0.999 && share < 1) return "> 99.9%";
  if (share > 0 && share < 0.001) return "< 0.1%";
  return `${(100 * share).toFixed(1)}%`;
}

export function labels(answer) {
  if (answer.ood?.refused) return "No prediction";
  return answer.label ? answer.label.split("|").join(", ") : "none of the findings";
}
