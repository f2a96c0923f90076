// Draws one board (window.BOARD, of draw.py) with the panels of @grafana/ui.
import { applyFieldOverrides, createTheme, dateTime, FieldType, getDisplayProcessor, Registry, ThemeContext, toDataFrame } from '@grafana/data';
import { LegendDisplayMode, TooltipDisplayMode, VizOrientation, BarGaugeDisplayMode, BigValueColorMode, BigValueGraphMode, BigValueJustifyMode, BigValueTextMode } from '@grafana/schema';
import { BarGauge, BigValue, GlobalStyles, TimeSeries } from '@grafana/ui';
import { createRoot } from 'react-dom/client';

const theme = createTheme({ colors: { mode: 'light' } });
const { board, from, to, width } = window.BOARD;
const COLUMN = width / 24, ROW = 34, GAP = 8, TITLE = 28;

const configOf = (panel) => ({ ...panel.fieldConfig.defaults, custom: panel.fieldConfig.defaults.custom });
const displayOf = (config) => getDisplayProcessor({ field: { type: FieldType.number, config, values: [] }, theme });

function Graph({ panel, width, height }) {
  const config = configOf(panel);
  const frames = panel.series.map((line) =>
    toDataFrame({
      fields: [
        { name: 'time', type: FieldType.time, values: line.times.map((t) => t * 1000) },
        { name: line.name, type: FieldType.number, values: line.values, config: { ...config, displayName: line.name } },
      ],
    })
  );
  const ready = applyFieldOverrides({
    data: frames, fieldConfig: { defaults: {}, overrides: [] }, replaceVariables: (text) => text, theme, timeZone: 'utc',
    fieldConfigRegistry: new Registry(() => []),
  });
  ready.forEach((frame, index) => {
    frame.fields.forEach((field) => { field.state = { ...field.state, seriesIndex: index, displayName: field.name, multipleFrames: true }; });
    const field = frame.fields[1];
    field.config = { ...config, displayName: field.name };
    field.display = getDisplayProcessor({ field, theme, timeZone: 'utc' });
  });
  const range = { from: dateTime(from * 1000), to: dateTime(to * 1000) };
  return (
    <TimeSeries frames={ready} timeRange={{ ...range, raw: range }} timeZone="utc" width={width} height={height}
      legend={{ displayMode: LegendDisplayMode.List, placement: 'bottom', showLegend: true, calcs: [] }}
      options={{ tooltip: { mode: TooltipDisplayMode.None } }} />
  );
}

function Numbers({ panel, width, height }) {
  const display = displayOf(configOf(panel));
  const each = height / panel.series.length;
  const mode = { value: BigValueTextMode.Value, value_and_name: BigValueTextMode.ValueAndName, name: BigValueTextMode.Name }[panel.options.textMode];
  return panel.series.map((line, index) => (
    <BigValue key={index} theme={theme} width={width} height={each} colorMode={BigValueColorMode.Value}
      graphMode={BigValueGraphMode.None} justifyMode={BigValueJustifyMode.Auto} textMode={mode}
      value={{ ...display(line.values.at(-1)), title: line.name }} />
  ));
}

function Bars({ panel, width, height }) {
  const config = configOf(panel);
  const field = { ...config, min: 0, max: Math.max(1, ...panel.series.map((line) => line.values.at(-1))) };
  const display = displayOf(config);
  const each = Math.min(26, height / panel.series.length);
  return panel.series.map((line, index) => (
    <BarGauge key={index} theme={theme} width={width} height={each} field={field} display={display} orientation={VizOrientation.Horizontal}
      displayMode={BarGaugeDisplayMode.Basic} showUnfilled value={{ ...display(line.values.at(-1)), title: line.name }} itemSpacing={2} />
  ));
}

const KINDS = { timeseries: Graph, stat: Numbers, bargauge: Bars };

function Panel({ panel }) {
  const { x, y, w, h } = panel.gridPos;
  const place = { position: 'absolute', left: x * COLUMN, top: y * ROW, width: w * COLUMN - GAP, height: h * ROW - GAP };
  if (panel.type === 'row') {
    return <div style={{ ...place, fontSize: 16, fontWeight: 500, paddingTop: 6 }}>{panel.title}</div>;
  }
  const Kind = KINDS[panel.type];
  const body = { width: w * COLUMN - GAP - 18, height: h * ROW - GAP - TITLE - 10 };
  return (
    <div style={{ ...place, background: '#fff', border: '1px solid #ddd', borderRadius: 2, overflow: 'hidden' }}>
      <div style={{ height: TITLE, padding: '5px 8px', fontSize: 13, fontWeight: 500, whiteSpace: 'nowrap' }}>{panel.title}</div>
      <div style={{ padding: '0 8px', ...body }}>
        {panel.series.length ? <Kind panel={panel} {...body} /> : <div style={{ color: '#888', paddingTop: 30, textAlign: 'center' }}>No data</div>}
      </div>
    </div>
  );
}

createRoot(document.getElementById('root')).render(
  <ThemeContext.Provider value={theme}>
    <GlobalStyles />
    <div style={{ position: 'relative', background: '#f4f5f5', padding: 8, height: window.BOARD.height - 16 }}>
      <div style={{ fontSize: 20, fontWeight: 500, height: 30 }}>{board.title}</div>
      <div style={{ position: 'relative' }}>{board.panels.map((panel) => <Panel key={panel.id} panel={panel} />)}</div>
    </div>
  </ThemeContext.Provider>
);
