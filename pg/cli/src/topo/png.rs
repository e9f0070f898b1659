//! `podring topo --png`: the slice as a picture.
//!
//! Layers (z) side by side; hosts as grey fields; chips as squares with their place in the mesh; links in the colour of the
//! mesh axis that they serve, black if none; wraps as stubs; links along z as short diagonals.

use embedded_graphics::{
    mono_font::{MonoTextStyle, ascii::FONT_5X8, ascii::FONT_8X13},
    pixelcolor::Rgb888,
    prelude::*,
    primitives::{Line, PrimitiveStyle, Rectangle},
    text::{Alignment, Baseline, Text, TextStyleBuilder},
};
use podring_topology::{
    draw::Drawing,
    link::{Direction, Link},
};

use super::{SHOWN, TopoError, View};

const COLOURS: [Rgb888; 8] = [
    Rgb888::new(0xd6, 0x27, 0x28),
    Rgb888::new(0x1f, 0x77, 0xb4),
    Rgb888::new(0x2c, 0xa0, 0x2c),
    Rgb888::new(0x94, 0x67, 0xbd),
    Rgb888::new(0xff, 0x7f, 0x0e),
    Rgb888::new(0x17, 0xbe, 0xcf),
    Rgb888::new(0x8c, 0x56, 0x4b),
    Rgb888::new(0xe3, 0x77, 0xc2),
];
const INK: Rgb888 = Rgb888::new(0x20, 0x20, 0x20);
const PLAIN_LINK: Rgb888 = Rgb888::new(0x60, 0x60, 0x60);
const HOST: Rgb888 = Rgb888::new(0xe8, 0xe8, 0xe8);
const CHIP: Rgb888 = Rgb888::new(0xff, 0xff, 0xff);
/// Pixels; larger slices get smaller chips so that a pod stays under about 4,000 pixels a side.
const LARGEST_SIDE: u32 = 4000;
const MARGIN: i32 = 24;
const LINE: i32 = 16;

struct Canvas {
    width: u32,
    height: u32,
    pixels: Vec<u8>,
}

impl Canvas {
    fn new(width: u32, height: u32) -> Canvas {
        Canvas { width, height, pixels: vec![0xff; width as usize * height as usize * 3] }
    }

    fn encode(&self) -> Result<Vec<u8>, TopoError> {
        let mut file = Vec::new();
        let mut encoder = png::Encoder::new(&mut file, self.width, self.height);
        encoder.set_color(png::ColorType::Rgb);
        encoder.set_depth(png::BitDepth::Eight);
        let mut writer = encoder.write_header()?;
        writer.write_image_data(&self.pixels)?;
        writer.finish()?;
        Ok(file)
    }
}

impl OriginDimensions for Canvas {
    fn size(&self) -> Size {
        Size::new(self.width, self.height)
    }
}

impl DrawTarget for Canvas {
    type Color = Rgb888;
    type Error = std::convert::Infallible;

    fn draw_iter<I>(&mut self, pixels: I) -> Result<(), Self::Error>
    where
        I: IntoIterator<Item = Pixel<Rgb888>>,
    {
        for Pixel(point, colour) in pixels {
            let inside =
                point.x >= 0 && point.y >= 0 && (point.x as u32) < self.width && (point.y as u32) < self.height;
            if inside {
                let at = (point.y as usize * self.width as usize + point.x as usize) * 3;
                self.pixels[at..at + 3].copy_from_slice(&[colour.r(), colour.g(), colour.b()]);
            }
        }
        Ok(())
    }
}

/// Where things stand, in pixels.
struct Plan {
    /// From chip to chip.
    pitch: i32,
    /// Side of a chip.
    side: i32,
    /// Layers per row of layers.
    per_row: i32,
    layer_width: i32,
    layer_height: i32,
    top: i32,
}

impl Plan {
    fn of(view: &View<'_>, label: usize, lines: i32) -> Plan {
        let [x, y, z] = view.slice.dims();
        let layers = z * view.slice.slices();
        let per_row = (1..=layers)
            .min_by_key(|&across| (x * across).abs_diff(y * layers.div_ceil(across)).saturating_add(across))
            .unwrap_or(1);
        let chips_across = (x + 1) * per_row;
        let chips_down = (y + 1) * layers.div_ceil(per_row);
        let wanted = (label as u32 * 8 + 34).clamp(40, 110);
        let pitch = wanted.min(LARGEST_SIDE / chips_across.max(chips_down)).max(6) as i32;
        Plan {
            pitch,
            side: (pitch * 6 / 10).max(3),
            per_row: per_row as i32,
            layer_width: (x as i32 + 1) * pitch,
            layer_height: (y as i32 + 1) * pitch,
            top: MARGIN + lines * LINE,
        }
    }

    fn origin(&self, layer: i32) -> Point {
        Point::new(
            MARGIN + layer % self.per_row * self.layer_width,
            self.top + layer / self.per_row * self.layer_height,
        )
    }

    fn centre(&self, layer: i32, chip: [u32; 3]) -> Point {
        let half = self.pitch / 2;
        self.origin(layer) + Point::new(chip[0] as i32 * self.pitch + half, chip[1] as i32 * self.pitch + half + LINE)
    }
}

/// The picture as a PNG file.
pub(super) fn picture(view: &View<'_>) -> Result<Vec<u8>, TopoError> {
    let slice = view.slice;
    let drawing = Drawing::new(slice, view.mesh.as_ref().map(|mesh| &mesh.mesh));
    let [x, y, z] = slice.dims();
    let label = drawing.label(slice.slices() - 1, [x - 1, y - 1, z - 1]).len();
    let headings = headings(view);
    let plan = Plan::of(view, label, headings.len() as i32 + 1);
    let layers = (z * slice.slices()) as i32;
    let rows = (layers + plan.per_row - 1) / plan.per_row;
    let widest = headings.iter().map(String::len).max().unwrap_or(0) as i32 * FONT_8X13.character_size.width as i32;
    let width = (plan.per_row * plan.layer_width).max(widest) + 2 * MARGIN;
    let mut canvas = Canvas::new(width as u32, (plan.top + rows * plan.layer_height + MARGIN) as u32);
    for (line, text) in headings.iter().enumerate() {
        let colour = if line == 0 { INK } else { COLOURS[(line - 1) % COLOURS.len()] };
        write(&mut canvas, text, Point::new(MARGIN, MARGIN / 2 + line as i32 * LINE), colour);
    }
    for slice_index in 0..slice.slices() {
        for layer_z in 0..z {
            let layer = (slice_index * z + layer_z) as i32;
            draw_layer(&mut canvas, view, &drawing, &plan, slice_index, layer_z, layer);
        }
    }
    canvas.encode()
}

fn write(canvas: &mut Canvas, text: &str, at: Point, colour: Rgb888) {
    let style = MonoTextStyle::new(&FONT_8X13, colour);
    let Ok(_) = Text::with_baseline(text, at, style, Baseline::Top).draw(canvas);
}

/// The title, then a line for each mesh axis.
fn headings(view: &View<'_>) -> Vec<String> {
    let slice = view.slice;
    let mut lines = vec![format!(
        "{slice}: {} chips, {} devices, {} hosts",
        slice.chips_per_slice() * slice.slices(),
        slice.devices(),
        slice.processes()
    )];
    let Some(mesh) = &view.mesh else { return lines };
    for (axis, report) in mesh.reports.iter().enumerate() {
        let mut line = format!("{}={} {}", mesh.mesh.names()[axis], mesh.mesh.sizes()[axis], report.group.kind.name());
        for collective in SHOWN {
            let time = report.predict(slice, collective, view.bytes).total_us();
            line.push_str(&format!("  {} {time:.0} us", collective.name()));
        }
        lines.push(line);
    }
    lines
}

fn draw_layer(
    canvas: &mut Canvas,
    view: &View<'_>,
    drawing: &Drawing<'_>,
    plan: &Plan,
    slice_index: u32,
    z: u32,
    layer: i32,
) {
    let slice = view.slice;
    let [columns, rows, depth] = slice.dims();
    let name = match (slice.slices() > 1, depth > 1) {
        (true, true) => format!("slice {slice_index} z={z}"),
        (true, false) => format!("slice {slice_index}"),
        (false, true) => format!("z={z}"),
        (false, false) => String::new(),
    };
    write(canvas, &name, plan.origin(layer), INK);
    let [host_x, host_y, _] = slice.host_bounds();
    let inset = plan.pitch / 12;
    for y in (0..rows).step_by(host_y as usize) {
        for x in (0..columns).step_by(host_x as usize) {
            let corner = plan.centre(layer, [x, y, z]) - Point::new_equal(plan.pitch / 2 - inset);
            let size = Size::new(
                (host_x as i32 * plan.pitch - 2 * inset).max(1) as u32,
                (host_y as i32 * plan.pitch - 2 * inset).max(1) as u32,
            );
            let Ok(()) = Rectangle::new(corner, size).into_styled(PrimitiveStyle::with_fill(HOST)).draw(canvas);
        }
    }
    for y in 0..rows {
        for x in 0..columns {
            for axis in 0..3 {
                for direction in Direction::BOTH {
                    if let Some(link) = slice.link([x, y, z], axis, direction) {
                        let colour = match drawing.axis_of(slice_index, &link) {
                            Some(axis) => COLOURS[axis % COLOURS.len()],
                            None => PLAIN_LINK,
                        };
                        draw_link(canvas, plan, layer, &link, colour);
                    }
                }
            }
        }
    }
    for y in 0..rows {
        for x in 0..columns {
            draw_chip(canvas, drawing, plan, slice_index, layer, [x, y, z]);
        }
    }
}

fn draw_link(canvas: &mut Canvas, plan: &Plan, layer: i32, link: &Link, colour: Rgb888) {
    let from = plan.centre(layer, link.from);
    let sign = if link.direction == Direction::Plus { 1 } else { -1 };
    let reach = match (link.axis, link.wraps) {
        (2, _) => Point::new(1, -1) * (plan.side * 8 / 10) * sign,
        (0, false) => Point::new(plan.pitch, 0) * sign,
        (0, true) => Point::new(plan.pitch * 9 / 20, 0) * sign,
        (_, false) => Point::new(0, plan.pitch) * sign,
        (_, true) => Point::new(0, plan.pitch * 9 / 20) * sign,
    };
    let thickness = (plan.pitch / 20).clamp(1, 4) as u32;
    let line = Line::new(from, from + reach);
    let Ok(()) = line.into_styled(PrimitiveStyle::with_stroke(colour, thickness)).draw(canvas);
}

fn draw_chip(canvas: &mut Canvas, drawing: &Drawing<'_>, plan: &Plan, slice_index: u32, layer: i32, chip: [u32; 3]) {
    let centre = plan.centre(layer, chip);
    let corner = centre - Point::new_equal(plan.side / 2);
    let square = Rectangle::new(corner, Size::new_equal(plan.side as u32));
    let Ok(()) = square.into_styled(PrimitiveStyle::with_fill(CHIP)).draw(canvas);
    let Ok(()) = square.into_styled(PrimitiveStyle::with_stroke(INK, 1)).draw(canvas);
    let label = drawing.label(slice_index, chip);
    let style = TextStyleBuilder::new().alignment(Alignment::Center).baseline(Baseline::Middle).build();
    let wide = label.len() as i32 * 8 > plan.side;
    let fits = label.len() as i32 * 5 <= plan.side;
    let font = if wide { MonoTextStyle::new(&FONT_5X8, INK) } else { MonoTextStyle::new(&FONT_8X13, INK) };
    if fits {
        let Ok(_) = Text::with_text_style(&label, centre, font, style).draw(canvas);
    } else if plan.side >= 12 {
        // Several devices on a chip: one under the other.
        let parts: Vec<&str> = label.split('|').collect();
        for (row, part) in parts.iter().enumerate() {
            if part.len() as i32 * 5 <= plan.side {
                let at = centre + Point::new(0, row as i32 * 9 - (parts.len() as i32 - 1) * 9 / 2);
                let Ok(_) = Text::with_text_style(part, at, font, style).draw(canvas);
            }
        }
    }
}
