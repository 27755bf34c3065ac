// Sorting by a click on a header, and zooming all lanes together by buttons, wheel and dragging.
document.querySelectorAll('thead th').forEach(th => th.addEventListener('click', () => {
  const column = th.cellIndex, body = th.closest('table').tBodies[0], down = th.dataset.down !== '1';
  th.closest('tr').querySelectorAll('th').forEach(header => delete header.dataset.down);
  th.dataset.down = down ? '1' : '0';
  const value = row => row.cells[column].textContent.replace(/,/g, '');
  const compare = (a, b) => { const x = parseFloat(value(a)), y = parseFloat(value(b));
    if (isNaN(x) || isNaN(y)) return isNaN(x) - isNaN(y) || value(a).localeCompare(value(b));
    return down ? y - x : x - y; };
  [...body.rows].sort(compare).forEach(row => body.append(row));
}));
const lanes = [...document.querySelectorAll('.lane svg')];
let from = 0, wide = {{ width }};
const show = () => { wide = Math.min({{ width }}, Math.max(wide, 1)); from = Math.min({{ width }} - wide, Math.max(0, from));
  lanes.forEach(svg => svg.setAttribute('viewBox', `${from} 0 ${wide} 20`));
  document.querySelectorAll('.axis').forEach(axis => [...axis.children].forEach((tick, place) => {
    const span = axis.dataset.ms / {{ width }}; tick.textContent = ((from + wide * place / 4) * span).toPrecision(4); })); };
const zoom = (factor, at) => { from += wide * at * (1 - factor); wide *= factor; show(); };
const act = { in: () => zoom(0.5, 0.5), out: () => zoom(2, 0.5), left: () => { from -= wide / 4; show(); },
  right: () => { from += wide / 4; show(); }, all: () => { wide = {{ width }}; show(); } };
document.querySelectorAll('.zoom button').forEach(button =>
  button.addEventListener('click', () => act[button.dataset.act]()));
const keys = { '+': 'in', '=': 'in', '-': 'out', ArrowLeft: 'left', ArrowRight: 'right', 0: 'all' };
document.querySelectorAll('.lanes').forEach(box => box.addEventListener('keydown', event => {
  if (keys[event.key]) { event.preventDefault(); act[keys[event.key]](); } }));
show();
lanes.forEach(svg => {
  const place = event => (event.clientX - svg.getBoundingClientRect().left) / svg.clientWidth;
  svg.addEventListener('wheel', event => { event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, place(event)); }, { passive: false });
  let grip = null;
  svg.addEventListener('pointerdown', event => { grip = place(event); svg.setPointerCapture(event.pointerId); });
  svg.addEventListener('pointermove', event => { if (grip === null) return;
    from += (grip - place(event)) * wide; grip = place(event); show(); });
  svg.addEventListener('pointerup', () => { grip = null; });
});
