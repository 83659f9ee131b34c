(() => {
  const chart = document.querySelector(".chart");
  if (!chart) return;
  const data = JSON.parse(document.getElementById("curve").textContent);
  const svg = chart.querySelector("svg"), tip = chart.querySelector(".tip"), cursor = chart.querySelector(".cursor");
  const left = +svg.dataset.left, right = +svg.dataset.right, width = +svg.dataset.width;
  const bins = Math.max(data.plain.length, data.plan.length);
  const size = n => { for (const [u, s] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) if (n >= s) return (n / s).toPrecision(4) + " " + u; return n + " B"; };
  const time = s => !data.timed ? Math.round(s) + " ops" : s >= 1 ? s.toFixed(2) + " s" : (s * 1e3).toPrecision(3) + " ms";
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) * width / box.width;
    const i = Math.floor((x - left) / (right - left) * bins);
    if (i < 0 || i >= bins) { tip.hidden = true; cursor.setAttribute("visibility", "hidden"); return; }
    tip.hidden = false;
    tip.textContent = `${time((i + .5) * data.bin)}: plain ${i < data.plain.length ? size(data.plain[i]) : "ended"}, planned ${i < data.plan.length ? size(data.plan[i]) : "ended"}`;
    const at = (event.clientX - box.left);
    tip.style.left = Math.min(at + 12, box.width - tip.offsetWidth) + "px"; tip.style.top = (event.clientY - box.top - 36) + "px";
    cursor.setAttribute("visibility", "visible"); cursor.setAttribute("x1", x); cursor.setAttribute("x2", x);
  });
  svg.addEventListener("pointerleave", () => { tip.hidden = true; cursor.setAttribute("visibility", "hidden"); });
})();
